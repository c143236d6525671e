"""What a rank reads in its environment."""

import socket

import pytest

from ltx2rt.ranks.environment import interface, rank_and_size
from tests.conftest import refused

RANK = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment,expected", [({}, (0, 1)), ({"WORLD_SIZE": "1"}, (0, 1)), (RANK, (3, 4))]
)
def test_environment_tells_which_rank_this_is(environment, expected):
    assert rank_and_size(environment) == expected


@pytest.mark.parametrize("environment,message", [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', expected a number from 1"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected a number from 1"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT"),
    (RANK | {"RANK": "x"}, "RANK is 'x', expected a number from 0 below 4"),
    (RANK | {"RANK": "4"}, "RANK is '4', expected a number from 0 below 4"),
    (RANK | {"RANK": "²"}, "RANK is '²', expected a number from 0 below 4"),
    (RANK | {"MASTER_PORT": "99999"}, "PORT is '99999', expected a number from 1 below 65536"),
    (RANK | {"MASTER_PORT": "port"}, "MASTER_PORT is 'port', expected a number from 1 below 65536"),
])  # fmt: skip
def test_environment_that_names_no_rank_is_refused(environment, message):
    with refused(message):
        rank_and_size(environment)


def test_a_store_listens_where_others_look_for_it(monkeypatch):
    assert interface("127.0.0.1") == "127.0.0.1" and interface("localhost") in ("127.0.0.1", "::1")
    assert interface("192.0.2.1") == "", "no address of this machine"
    assert interface("no such host") == ""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert interface("node1") == "", "its own name means this machine to nobody else"
