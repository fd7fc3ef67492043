"""What a host pool is made of: its layout, its memory, and how ranks come to share it."""
