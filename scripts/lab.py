"""JupyterLab on the labs in work/: three lines, the address among them, in place of Jupyter's log.

    python scripts/lab.py [--first] [options of Jupyter's server]
--first opens the tour, otherwise the folder opens.
"""
import secrets
import sys

from jupyter_server.serverapp import ServerApp

from ranklab.course.status import status

TOKEN = secrets.token_hex(24)    # for a token of its own Jupyter would print six lines of address


class Server(ServerApp):
    """Jupyter's server, which says in our words that it is there."""

    begin = ""

    def start_ioloop(self):
        """Print the three lines, and serve."""
        print(f"\nopen   {self.local_url.replace('token=...', f'token={TOKEN}')}\n"
              f"begin  {self.begin}\n"
              "stop   with Ctrl-C, twice; your cells stay in work/\n", flush=True)
        super().start_ioloop()


def main(argv):
    page, Server.begin = "/lab/tree/work", status().splitlines()[-1].replace(
        "you are in", "where you were,")
    if "--first" in argv:
        page, Server.begin = page + "/tour.ipynb", "with tour.ipynb; then open 00_ranks.ipynb"
    Server.launch_instance([
        f"--ServerApp.default_url={page}", "--ServerApp.root_dir=.",
        f"--IdentityProvider.token={TOKEN}", "--Application.log_level=ERROR",
        *(argument for argument in argv if argument != "--first")])


if __name__ == "__main__":
    main(sys.argv[1:])
