"""What backends share: checks of arguments, access to slots, pages of host memory, and threads in native calls."""
