"""State trees and the files they are saved in."""
