"""How the processes of one job find each other, agree on start-up and hand over descriptors.

Knows nothing of devices, memory or collectives.
"""
