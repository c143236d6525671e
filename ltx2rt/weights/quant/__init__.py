"""Weights in few bits, as files hold them."""
