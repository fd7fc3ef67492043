"""What backends share: argument checks, slot access, host pages, threads in native calls."""
