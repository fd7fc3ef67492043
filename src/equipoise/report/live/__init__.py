"""What `equipoise run --live` shows: the state that messages build, and the frame drawn of it."""
