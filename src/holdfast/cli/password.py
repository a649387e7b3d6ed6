"""`holdfast password`: who is in the password file, and which HTTP tokens there are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from holdfast.cli import output
from holdfast.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="Who may connect: the password file, and tokens for HTTP.")
token_app = typer.Typer(no_args_is_help=True, help="Tokens for the HTTP API.")
app.add_typer(token_app, name="token")

Name = Annotated[str, typer.Argument(help="The user's name.")]
TokenName = Annotated[str, typer.Argument(help="What the token is called; whoever holds it goes by this name.")]
PasswordFile = Annotated[Path, typer.Option("--file", help="The password file.", envvar="HOLDFAST_PASSWORD_FILE")]
TokenFile = Annotated[Path, typer.Option("--file", help="The HTTP token file.", envvar="HOLDFAST_HTTP_TOKENS_FILE")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]

PASSWORDS = Path("passwords.txt")
TOKENS = Path("http-tokens.txt")


@app.command("set")
def set_(
    name: Name,
    file: PasswordFile = PASSWORDS,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the password from the first line of input.")] = False,
) -> None:
    """Add a user, or change one's password (asked for twice). A running node notices by itself."""
    from holdfast.auth import passwords

    new = passwords.set_password(file, name, _first_line() if stdin else _asked(name))
    print(f"{file}: {'added' if new else 'changed the password of'} {name}")


@app.command("delete")
def delete(name: Name, file: PasswordFile = PASSWORDS) -> None:
    """Take a user out of the file. Connections that are open stay open."""
    from holdfast.auth import passwords

    passwords.delete_user(file, name)
    print(f"{file}: deleted {name}")


@app.command("ls")
def ls(file: PasswordFile = PASSWORDS, json: AsJson = False) -> None:
    """Every user of the file, and how the password is hashed."""
    from holdfast.auth import passwords

    output.table(passwords.list_users(file), json)


@token_app.command("create")
def token_create(
    name: TokenName,
    role: Annotated[list[str], typer.Option("--role", help="reader, publisher or admin; give it again for more.")],
    file: TokenFile = TOKENS,
) -> None:
    """Make a token and print it: once, since only its hash is kept."""
    from holdfast.auth import http_tokens
    from holdfast.auth.identity import ROLES, Role

    for given in role:
        if given not in ROLES:
            raise RequestError(f"--role: got {given!r}; takes {', '.join(ROLES)}")
    token = http_tokens.make_token(file, name, cast(list[Role], role))
    print(f"{file}: added {name}; this is its token, which is not shown again:", file=sys.stderr)
    print(token)


@token_app.command("delete")
def token_delete(name: TokenName, file: TokenFile = TOKENS) -> None:
    """Take a token out of the file; whoever holds it is refused from then on."""
    from holdfast.auth import http_tokens

    http_tokens.delete_token(file, name)
    print(f"{file}: deleted {name}")


@token_app.command("ls")
def token_ls(file: TokenFile = TOKENS, json: AsJson = False) -> None:
    """Every token of the file, and what it may do."""
    from holdfast.auth import http_tokens

    rows = [{"token": entry.name, "roles": ", ".join(entry.roles)} for entry in http_tokens.list_tokens(file)]
    output.table(rows, json)


def _asked(name: str) -> str:
    return str(typer.prompt(f"Password for {name}", hide_input=True, confirmation_prompt="Once more"))


def _first_line() -> str:
    try:
        # As bytes: what a terminal's locale makes of them is not what clients will send.
        return sys.stdin.buffer.readline().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError("the password on standard input is not UTF-8; give it as UTF-8 text") from error
