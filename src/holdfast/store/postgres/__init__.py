"""A store in a PostgreSQL database, which several nodes may share: so it carries their messages as well."""
