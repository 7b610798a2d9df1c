"""Kinds of device that ranks run on, one file each.

A device is verbs without collectives: it knows nothing of algorithms or ranks.
"""
