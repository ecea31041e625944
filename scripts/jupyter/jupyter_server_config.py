import os
import re

# A login shell, Jupyter's choice for a server without a terminal of its own, would set PATH anew:
# `ranklab` would not be found in JupyterLab's terminal.
c = get_config()  # noqa: F821 - Jupyter puts it here
c.ServerApp.terminado_settings = {"shell_command": [os.environ.get("SHELL") or "sh"]}
# Without this it says, below the address, which 18 language servers are not installed.
c.LanguageServerManager.autodetect = False

# A codespace shows this server at an address of its own, from which Jupyter would run no cell.
if (domain := os.environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN")):
    name = re.escape(os.environ["CODESPACE_NAME"])
    c.ServerApp.allow_origin_pat = rf"https://{name}-\d+\.{re.escape(domain)}$"
