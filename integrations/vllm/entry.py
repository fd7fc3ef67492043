"""Entry point of the vLLM plugin; imports nothing that could fail.

vLLM logs errors while it loads a plugin's module, and goes on without it; an error in the plugin's
function ends the start. So everything else is imported in `register`: a user who has configured a
feature gets the error, and other users are not affected.
"""

import logging
import os
import sys
from importlib import import_module

LOG = logging.getLogger("vllm.equipoise")
"""A child of vLLM's logger, whose format and level it inherits."""
PLUGIN = "equipoise.integrations.vllm.plugin"
OWN_NAME = "equipoise"
SETTINGS_VARIABLE = "EQUIPOISE_VLLM"


def register() -> None:
    """Install the hooks; they do nothing unless a feature is on.

    Raises whatever prevents that if the environment or the command line mention equipoise;
    otherwise logs it.
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
    """Whether the environment or the command line mention equipoise.

    The configuration itself is not available before the hooks are installed.
    """
    return SETTINGS_VARIABLE in os.environ or any(OWN_NAME in argument for argument in sys.argv[1:])
