"""Clients that others made, against a real server of the embedded model; a package, so that all share one server."""
