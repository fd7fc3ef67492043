"""Request balance: which worker serves a request, and when that is decided."""
