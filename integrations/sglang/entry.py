"""Entry point of the SGLang plugin: nothing, unless the environment configures a feature.

SGLang runs `register` in each of its processes before it reads a configuration, logs what a plugin
raises, and starts without the plugin. A user who has configured a feature would not notice, so what
prevents it ends the process here.
"""

import os
from importlib import import_module

PLUGIN = "equipoise.integrations.sglang.plugin"
SETTINGS_VARIABLE = "EQUIPOISE_SGLANG"
"""Environment variable with the settings as JSON: `{"eplb_policy": true}`."""


def register() -> None:
    """Register the hooks of the configured features; without any import nothing.

    Raises `SystemExit` with one line that says what prevents a configured feature.
    """
    text = os.environ.get(SETTINGS_VARIABLE, "")
    if not text.strip():
        return
    try:
        import_module(PLUGIN).install(text)
    except Exception as error:
        raise SystemExit(f"equipoise: {error}") from error
