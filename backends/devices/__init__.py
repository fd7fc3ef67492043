"""The accelerator code that all vendors share: streams, events, slots, locks and graphs.

Written once against `runtime.DeviceRuntime`, the few calls that differ by vendor.
"""
