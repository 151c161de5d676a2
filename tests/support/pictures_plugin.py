"""The pictures as a plugin: `--plugin tests/support/pictures_plugin.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pictures

pictures.register()
