"""A communicator over a vendor's library of collectives, written once for all such libraries.

`library.Library` and `library.Group` are what each of them brings.
"""
