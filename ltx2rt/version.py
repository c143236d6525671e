"""The version of the package, apart from the Python interface, so that every layer can read it."""

VERSION = "0.2.0"
