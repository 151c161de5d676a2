"""What the process and the machine provide: files, devices, signals, random number generators."""
