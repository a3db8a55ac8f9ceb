"""memd's control plane: settings, sessions, administration, metrics around `memd_native.Server`."""

__version__ = "0.1.0"
