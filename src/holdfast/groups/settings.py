"""What may be tuned, each machine's own; the defaults are the ones the figures are promised for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """For borrowers and batch members."""

    find_leader_seconds: float = 0.2
    """How soon a member that found no leader asks again."""
    find_leader_max_seconds: float = 0.3
    """The wait doubles up to this; together with `remember_seconds` it must stay below `settle_seconds`."""
    ping_seconds: float = 2.0
    """How often a connected member shows that it is alive."""
    ping_resend_seconds: float = 0.4
    """How soon an unanswered ping is repeated; without this, one lost message would cost the streams."""
    progress_seconds: float = 0.15
    """Acknowledgements are gathered this long before they are reported."""
    unsubscribe_seconds: float = 10.0
    """How long an unsubscribing member waits for the client's last acknowledgements."""
    disconnect_resend_seconds: float = 0.5
    """How soon last words are repeated while nobody has confirmed them."""
    disconnect_seconds: float = 15.0
    """How long last words are repeated before the member gives up, if they say nothing but good-bye."""
    disconnect_carrying_seconds: float = 60.0
    """The same if they carry acknowledgements: longer than the store may well be away."""

    def last_words_seconds(self, *, carrying: bool) -> float:
        return self.disconnect_carrying_seconds if carrying else self.disconnect_seconds


@dataclass(frozen=True, kw_only=True)
class LeaderSettings:
    """For a group's leader."""

    ping_timeout_seconds: float = 3.0
    """How long a silent member keeps its streams."""
    clock_margin_seconds: float = 0.25
    """What a leader waits beyond that before it lends them on; two clocks may differ in speed."""
    resend_seconds: float = 0.5
    """How soon a grant, a revoke or a revoked is repeated."""
    revoke_seconds: float = 10.0
    """How long a member may take over what is in flight of one stream that is called back."""
    place_seconds: float = 0.02
    """Joins and leaves are gathered this long before streams are placed."""
    settle_seconds: float = 0.5
    """A leader that follows another one waits this long for members to bring their progress."""
    settle_after_outage_seconds: float = 2.0
    """The same where the store was away, so that the registries of other nodes may take longer to find the leader."""
    save_seconds: float = 1.0
    """Progress is gathered this long before it is saved."""
    gather_seconds: float = 0.004
    """Final progress, which somebody waits for, is gathered only this long."""
    save_retry_seconds: float = 0.5
    """How soon a save that failed is tried again."""
    save_retry_max_seconds: float = 30.0
    """What cannot be saved even by itself is tried again less and less often, down to this."""
    ranges_max: int = 16_000
    """A progress with more acknowledged ranges than this is stored over several values."""
    refusal_rest_seconds: float = 10.0
    """How long a member that refused a message because of its size is not lent that piece again."""
    linger_seconds: float = 10.0
    """A leader without members, or without a group, stays this long."""
    slices_max: int = 64
    """At most so many key slices of one stream; 1 switches slicing off."""


@dataclass(frozen=True, kw_only=True)
class ElectionSettings:
    """For the claims of one node."""

    lease_seconds: float = 5.0
    """How long the claims of a silent node stand."""
    renew_seconds: float = 1.5
    """How often the lease is renewed: well inside it."""
    retry_seconds: float = 0.3
    """How soon a renewal or a claim that failed is tried again."""
    margin_seconds: float = 0.5
    """How long before the lease ends, by its own clock, a node's leaders stop."""
    remember_seconds: float = 0.15
    """How long a registry believes that a leader is where it was last found."""
    cool_seconds: float = 3.5
    """How long the claim of a leader that broke down is kept, so that what it lent has surely ended; not less than
    `lease_seconds`."""
