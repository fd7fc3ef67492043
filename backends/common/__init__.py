"""What several backends need: the control plane over torch's TCP store, and waits that end."""
