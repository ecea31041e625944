"""A receiver for Alertmanager: python -m ranklab.cluster.webhook ADDRESS FILE

Each alert becomes one line of JSON in FILE, with the time at which it came.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def serve(address, path):
    """Serve until killed; print the address first."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in sent["alerts"]:
                line = json.dumps({"time": time.time(), **alert}) + "\n"
                os.write(file, line.encode())  # a whole line at once, because others read it
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer((address, 0), Handler)
    print(f"Listening on address={address}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
