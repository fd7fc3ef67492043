"""What vLLM loads as a plugin, and nothing beside it: imports nothing that could fail.

vLLM logs what goes wrong while it loads a plugin, and serves without it; what goes wrong in the
plugin's function ends its start. So everything else is imported there: who has asked for a part
learns that it cannot be had, and nobody else is stopped.
"""

import logging
import os
import sys
from importlib import import_module

LOG = logging.getLogger("vllm.equipoise")
"""Below vLLM's own logger, whose format and level it takes."""
PLUGIN = "equipoise.integrations.vllm.plugin"
OWN_NAME = "equipoise"
SETTINGS_VARIABLE = "EQUIPOISE_VLLM"


def register() -> None:
    """Put the hooks in; harmless where nothing is switched on.

    Raises whatever keeps it from that, where the environment or the command line name us.
    """
    try:
        plugin = import_module(PLUGIN)
    except Exception as error:
        if is_requested():
            raise
        LOG.warning("equipoise cannot be imported, and stays switched off: %r", error)
        return
    plugin.register()


def is_requested() -> bool:
    """Whether the environment or the command line name us, as far as can be told without hooks."""
    return SETTINGS_VARIABLE in os.environ or any(OWN_NAME in argument for argument in sys.argv[1:])
