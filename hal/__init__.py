"""The hardware contract: protocols, capabilities, errors."""
