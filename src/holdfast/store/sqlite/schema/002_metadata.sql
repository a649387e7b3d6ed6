-- Metadata: small keys with versions, leases that keys may depend on, and one counter for all versions.

-- One row. `revision` is the last version given; deletions up to `trimmed` may have been forgotten.
create table metadata_revision (
    revision  integer not null,
    trimmed   integer not null
);

insert into metadata_revision values (0, 0);

create table metadata (
    key      text primary key,
    value    blob,                         -- null: deleted; kept for a while so that watchers learn of it
    version  integer not null,
    lease    integer                       -- null: lives until it is deleted
);

-- What a watcher reads: everything after the last version it has seen.
create index metadata_by_version on metadata (version);
create index metadata_deleted on metadata (version) where value is null;
create index metadata_by_lease on metadata (lease) where lease is not null;

create table metadata_leases (
    id          integer primary key autoincrement,  -- a number is never given twice
    expires_at  real not null                       -- seconds since 1970, by the wall clock
);

create index metadata_leases_by_expiry on metadata_leases (expires_at);
