"""Adapters of clouds: live prices now, machines later. Each is imported when it is used."""
