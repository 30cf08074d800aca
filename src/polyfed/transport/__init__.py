"""How packets travel between a server and its devices over HTTPS. Nothing here imports PyTorch.

- `web.py`: a web server that other machines can reach, with limits on headers.
- `queue.py`: the packets on the server's disk, in SQLite and files, between the process of a run and the web server.
- `hub.py`: the web application for devices, and the command that runs it.
- `logins.py`: who a device is: the keys that are registered, challenges and tokens.
- `connection.py`: a device's calls to the server. `proxy.py`: the proxy on their way.
- `tokens.py`: join tokens, and the register of devices. `joining.py`: the calls of a device that joins.
"""
