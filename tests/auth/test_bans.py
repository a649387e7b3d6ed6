"""Bans: who is found, and what cannot be banned."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.auth.bans import NAME_BYTES_MAX, SECS_MAX, Ban, Bans, check_kind, check_name, make_ban
from holdfast.errors import RequestError

NOW = 1_000.0


def table(*bans: Ban) -> Bans:
    made = Bans()
    made.replace(bans)
    return made


def address(name: str, until: float | None = None) -> Ban:
    return Ban("address", check_name("address", name), until=until)


def test_nobody_is_banned_where_there_are_no_bans() -> None:
    assert Bans().find("c", "u", "10.0.0.1", NOW) is None
    assert not Bans()


def test_each_kind_is_looked_up_as_what_it_is() -> None:
    client, user = Ban("client", "x"), Ban("user", "x")
    assert table(client).find("x", None, None, NOW) == client
    assert table(client).find("y", "x", "10.0.0.1", NOW) is None
    assert table(user).find("y", "x", None, NOW) == user
    assert table(user).find("x", None, None, NOW) is None, "an anonymous client has no name"
    assert table(Ban("client", "None"), Ban("user", "None")).find(None, None, None, NOW) is None


def test_a_ban_with_an_end_ends_by_itself() -> None:
    bans = table(Ban("client", "c", until=NOW), address("10.0.0.1", NOW + 1), Ban("user", "u"))
    assert bans.find("c", None, None, NOW - 0.1) is not None
    assert bans.find("c", None, None, NOW) is None
    assert bans.due(NOW - 0.1) == []
    assert bans.due(NOW) == [Ban("client", "c", until=NOW)]
    assert {ban.name for ban in bans.due(NOW + 9)} == {"c", "10.0.0.1"}


def test_a_ban_that_has_ended_does_not_hide_another_one() -> None:
    still = address("10.0.0.0/8")
    bans = table(Ban("client", "c", until=1), Ban("user", "u", until=1), address("10.0.0.1", 1), still)
    assert bans.find("c", "u", "10.0.0.1", NOW) == still


def test_replacing_tells_what_is_new() -> None:
    bans, a, b = Bans(), Ban("client", "a"), Ban("client", "b")
    assert bans.replace([a]) == [a]
    assert bans.replace([a, b]) == [b]
    assert bans.replace([b]) == []
    assert bans.find("a", None, None, NOW) is None
    again = Ban("client", "b", made_at=NOW)
    assert bans.replace([again]) == [again]


@pytest.mark.parametrize(
    ("given_name", "written"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1/32", "10.0.0.1"),
        ("10.0.0.0/255.0.0.0", "10.0.0.0/8"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
    ],
)
def test_an_address_is_written_in_one_way(given_name: str, written: str) -> None:
    assert check_name("address", given_name) == written == check_name("address", written)


def test_an_ipv4_address_in_ipv6_clothes_is_found() -> None:
    assert table(address("10.0.0.0/8")).find(None, None, "::ffff:10.1.2.3", NOW)
    assert table(address("::ffff:10.1.2.3")).find(None, None, "10.1.2.3", NOW)
    assert table(address("::/0")).find(None, None, "10.1.2.3", NOW) is None
    assert table(address("fe80::/10")).find(None, None, "fe80::1%eth0", NOW)
    assert table(address("::/0")).find(None, None, "unknown", NOW) is None


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("clients", "x", "kind 'clients' is unknown; it is one of client, user, address"),
        ("", "x", "kind '' is unknown"),
        ("client", "", "client id '' is empty"),
        ("user", "", "user name '' is empty"),
        ("address", "", "address '' is empty"),
        ("client", "a\0b", r"client id 'a\\x00b' contains NUL"),
        ("user", "x" * (NAME_BYTES_MAX + 1), "has 65536 bytes; it takes up to 65535"),
        ("client", "é" * 32_768, "has 65536 bytes"),
        ("client", "\ud800", "is not valid Unicode"),
        ("address", "10.0.0.256", "address '10.0.0.256' is neither"),
        ("address", "example.com", "address 'example.com' is neither"),
        ("address", "10.0.0.0/33", "address '10.0.0.0/33' is neither"),
        ("address", "10.0.0.1/8", r"address '10.0.0.1/8' is an address inside of a network; the network is 10.0.0.0/8"),
        ("address", "fe80::1%eth0", "interface"),
    ],
)
def test_what_cannot_be_banned_is_named(kind: str, name: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        make_ban(kind, name, "", None, NOW)


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf"), SECS_MAX * 2])
def test_a_length_that_cannot_be_is_named(secs: float) -> None:
    with pytest.raises(RequestError, match=f"secs {secs!r}"):
        make_ban("client", "x", "", secs, NOW)


@pytest.mark.parametrize("reason", ["x" * 501, "\ud800"])
def test_a_reason_that_cannot_be_is_named(reason: str) -> None:
    with pytest.raises(RequestError, match="reason"):
        make_ban("client", "x", reason, None, NOW)


def test_a_ban_begins_now() -> None:
    made = make_ban("client", "x" * NAME_BYTES_MAX, "why", 5, NOW)
    assert (made.made_at, made.until, made.reason) == (NOW, NOW + 5, "why")
    assert make_ban("user", "x", "", None, NOW).until is None
    assert check_kind("user") == "user"


# -- addresses, against a plain list -----------------------------------------------------------------------------------

# Few different bits, so that networks hold each other and addresses fall into them.
_few_4 = st.builds(lambda a, b, c: (a << 24) | (b << 8) | c, *[st.sampled_from([0, 1, 127, 128, 255])] * 3)
_few_6 = st.builds(lambda a, b: (a << 112) | b, st.sampled_from([0, 0x2001, 0xFE80]), st.integers(0, 3))
_hosts = st.one_of(_few_4.map(ipaddress.IPv4Address), _few_6.map(ipaddress.IPv6Address), st.ip_addresses())


@st.composite
def _networks(draw: st.DrawFn) -> str:
    host = draw(_hosts)
    return str(ipaddress.ip_network((host, draw(st.integers(0, host.max_prefixlen))), strict=False))


_bans = st.lists(st.tuples(_networks(), st.sampled_from([None, NOW - 1, NOW + 1])), max_size=12)


def _plain(host: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return getattr(host, "ipv4_mapped", None) or host


@given(_bans, st.lists(_hosts, max_size=8))
def test_addresses_are_found_as_in_a_plain_list(
    made: list[tuple[str, float | None]], hosts: list[ipaddress.IPv4Address | ipaddress.IPv6Address]
) -> None:
    by_name = {ban.name: ban for ban in (address(name, until) for name, until in made)}
    bans = table(*by_name.values())
    inside = [ipaddress.ip_network(name).network_address for name in by_name]
    for host in (*hosts, *inside):
        fitting = [
            (network.prefixlen, ban)
            for ban in by_name.values()
            if _plain(host) in (network := ipaddress.ip_network(ban.name)) and not ban.ended(NOW)
        ]
        found = bans.find(None, None, str(host), NOW)
        assert found == (max(fitting, key=lambda each: each[0])[1] if fitting else None)
