"""One run, from a request to files: what the commands, the Python interface and the server
share."""
