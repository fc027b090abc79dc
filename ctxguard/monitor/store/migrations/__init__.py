"""Stores of older releases brought to this one's schema, without loss: a module for each version.

What a step needs of the schema and the formats of its time is written down in its module, so that
it stays true when they change. A step adds and fills; processes of the release before it that are
still writing go on, since new columns have a default in the database.
"""

from importlib import import_module

import sqlalchemy as sa

from ctxguard._support.extras import require
from ctxguard.monitor.store.schema import SCHEMA_VERSION, schema_version


def migrate(connection: sa.Connection, found: int) -> None:
    """Bring the tables from a schema version to this release's, in the caller's transaction.

    Args:
        connection: In a transaction that excludes others who create or migrate the tables.
        found: The version of the tables, ≥ 1.
    """
    runtime = require("alembic.runtime.migration", "monitor")
    operations = require("alembic.operations", "monitor").Operations(
        runtime.MigrationContext.configure(connection)
    )
    for version in range(found + 1, SCHEMA_VERSION + 1):
        import_module(f"{__name__}.version_{version}").upgrade(operations)
        connection.execute(sa.insert(schema_version).values(version=version))
