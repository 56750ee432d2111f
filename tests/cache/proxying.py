"""A forward proxy, run as ``python proxying.py [USER:PASSWORD]``: prints its port, then one line for each request.

It passes on what is asked by a whole URL, and opens tunnels; without the right password it answers 407.
"""

from __future__ import annotations

import base64
import select
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASSWORD = "Basic " + base64.b64encode(sys.argv[1].encode()).decode() if len(sys.argv) > 1 else None


class Proxy(BaseHTTPRequestHandler):
    def pass_on(self) -> None:
        """Send the request to its host, and the answer back, until either side ends."""
        if PASSWORD is not None and self.headers["Proxy-Authorization"] != PASSWORD:
            self.send_response(407)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        print(self.command, self.path, flush=True)
        tunnel = self.command == "CONNECT"
        url = urlsplit(f"//{self.path}" if tunnel else self.path)
        with socket.create_connection((url.hostname, url.port or 80)) as host:
            if tunnel:
                self.connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                path = url._replace(scheme="", netloc="").geturl()
                headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items() if "oxy-" not in name)
                host.sendall(f"{self.command} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
                host.sendall(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                # Who is not told that the connection ends with this answer asks on it again, while it is being closed.
                status, _, more = host.recv(1 << 16).partition(b"\r\n")
                self.connection.sendall(status + b"\r\nConnection: close\r\n" + more)
            self.relay(host)
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = pass_on

    def relay(self, host: socket.socket) -> None:
        others = {host: self.connection, self.connection: host}
        while True:
            for ready in select.select([*others], [], [], 60)[0]:
                if not (data := ready.recv(1 << 16)):
                    return
                others[ready].sendall(data)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
