-- Metadata: small keys with versions, leases that keys may depend on, and one counter for all versions.

-- One row, locked by every change until it commits, so versions become visible in their order.
-- `revision` is the last version given; deletions up to `trimmed` may have been forgotten.
create table metadata_revision (
    revision  bigint not null,
    trimmed   bigint not null
);

insert into metadata_revision values (0, 0);

create table metadata (
    key      text collate "C" primary key,
    value    bytea,                        -- null: deleted; kept for a while so that watchers learn of it
    version  bigint not null,
    lease    bigint                        -- null: lives until it is deleted
);

-- What a watcher reads: everything after the last version it has seen.
create index metadata_by_version on metadata (version);
create index metadata_deleted on metadata (version) where value is null;
create index metadata_by_lease on metadata (lease) where lease is not null;

create table metadata_leases (
    id          bigint generated always as identity primary key,  -- a number is never given twice
    expires_at  double precision not null                         -- seconds since 1970, by the server's clock
);

create index metadata_leases_by_expiry on metadata_leases (expires_at);
