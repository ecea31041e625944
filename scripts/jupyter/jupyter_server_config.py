import os

# A login shell, Jupyter's choice for a server without a terminal of its own, would set PATH anew:
# `ranklab` would not be found in JupyterLab's terminal.
c = get_config()  # noqa: F821 - Jupyter puts it here
c.ServerApp.terminado_settings = {"shell_command": [os.environ.get("SHELL") or "sh"]}
# Without this it says, below the address, which 18 language servers are not installed.
c.LanguageServerManager.autodetect = False
