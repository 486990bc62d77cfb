"""Offers and GPU facts, with a source and a date for each price."""
