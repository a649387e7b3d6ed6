-- Sessions: one row each, changed only by whoever has seen it as it is.

-- A client id may be longer than a B-tree entry, so it is known by its hash.
create table sessions (
    client_id      text collate "C" not null,
    epoch          bigint not null,          -- who took it: a number that is never given twice
    seq            bigint not null,          -- how many writes its owner has made under this epoch
    owner          text,                     -- the node that serves it
    lease          bigint,                   -- and that node's lease; null: the client is away
    connect        text not null,            -- tokens of the CONNECT it was last taken for,
    born           text not null,            -- and of the one that began it
    expiry_secs    bigint not null,
    left_at        double precision,         -- when the connection ended; seconds since 1970
    will           bytea,
    will_due       double precision,
    due            double precision,         -- when somebody has to look at it: its end, or its will
    subscriptions  bytea not null,
    cursors        bytea not null,
    packets        bytea not null,
    dead           boolean not null          -- deleted; kept for a while, so that nothing brings it back
) with (fillfactor = 80);                    -- room for the next version of a row beside it: no index is touched

create sequence session_epochs;
create unique index sessions_once on sessions ((md5(client_id)::uuid));
create index sessions_due on sessions (due) where due is not null;
create index sessions_of_lease on sessions (lease, left(client_id, 200)) where lease is not null;
create index sessions_dead on sessions (left_at) where dead;

-- How many sessions subscribe to each filter. A count of 0 is kept for a while, so that every node hears of it.
create table session_filters (
    filter      text not null,
    sessions    bigint not null,
    version     bigint not null,             -- the transaction that changed it last
    changed_at  double precision not null
);
create unique index session_filters_once on session_filters ((md5(filter)::uuid));
create index session_filters_by_version on session_filters (version);
create index session_filters_unused on session_filters (changed_at) where sessions = 0;

-- One row: up to which version counts of 0 may be gone.
create table session_filters_trimmed (
    version  bigint not null
);

insert into session_filters_trimmed values (0);

-- QoS 2 publishes that are in the log and were not released yet.
create table session_received (
    client_id  text collate "C" not null,
    born       text not null,                -- of the session they were sent in
    packet_id  integer not null,
    mark       bigint not null               -- which publish it is, of all that ever had this packet id
);
create unique index session_received_once on session_received ((md5(client_id)::uuid), born, packet_id);
