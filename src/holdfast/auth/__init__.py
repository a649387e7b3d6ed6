"""Who may connect, and what they may publish and subscribe to: decided here, without sockets or a clock."""

from holdfast.auth.acl import Acl
from holdfast.auth.authenticator import Authenticator, AuthOptions
from holdfast.auth.identity import Credentials, Identity, Refusal, Role

__all__ = ["Acl", "AuthOptions", "Authenticator", "Credentials", "Identity", "Refusal", "Role"]
