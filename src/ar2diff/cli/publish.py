"""`ar2diff publish`: push a verified export to a hub."""

from pathlib import Path


def publish(
    folder: Path,
    repo: str,
    *,
    to: str,
    base_license: str,
    token_file: Path,
    public: bool = False,
    endpoint: str | None = None,
) -> None:
    """Push an export to a hub, once it passes its verifier.

    The token is read from the file named and sent with this upload alone. Tokens of the environment or of other
    tools are never used.

    Args:
        folder: An exported folder.
        repo: Where to: hub:OWNER/NAME.
        to: The format of the folder, as in `ar2diff export --to`.
        base_license: The licence of the base, such as apache-2.0; it must allow a changed model to be passed on.
        token_file: A file that holds a token with write access.
        public: Make a new repository public; private by default.
        endpoint: Another hub than the default one.
    """
    from ar2diff.errors import ConfigError
    from ar2diff.export.publish import parse_repo, publish_export

    repo_id = parse_repo(repo)
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token cannot be read: {error}", given=str(token_file)) from None
    commit = publish_export(
        folder, to, repo_id, token=token, license_id=base_license, endpoint=endpoint, private=not public
    )
    print(f"published {folder} as {repo_id} at {commit}")
