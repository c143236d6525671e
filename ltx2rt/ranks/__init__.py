"""One process per device or per host: how ranks are started, how they agree, and how they end
together.

How ranks reach the store that they share is their backend's business, and so are collectives.
"""
