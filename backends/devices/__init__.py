"""What the devices of all vendors have in common: streams, events, slots, locks and graphs.

Written once against `runtime.DeviceRuntime`, the few things that each vendor's binding brings.
"""
