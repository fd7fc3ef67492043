"""What a run keeps in its store."""

from equipoise.backends.common.control_plane import StoreControlPlane


def store_keys(plane: StoreControlPlane) -> set[str]:
    """Every key but those of heartbeats, which come when they come."""
    return {key for key in plane.store.list_keys() if not key.startswith("beat/")}
