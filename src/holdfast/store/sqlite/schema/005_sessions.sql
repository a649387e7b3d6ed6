-- Sessions: one row each, changed only by whoever has seen it as it is.

-- With a rowid, sessions that began together lie together, whatever their names: a flush writes fewer pages.
create table sessions (
    client_id      text not null unique,
    epoch          integer not null,         -- who took it: a number that is never given twice
    seq            integer not null,         -- how many writes its owner has made under this epoch
    owner          text,                     -- the node that serves it
    lease          integer,                  -- and that node's lease; null: the client is away
    connect        text not null,            -- tokens of the CONNECT it was last taken for,
    born           text not null,            -- and of the one that began it
    expiry_secs    integer not null,
    left_at        real,                     -- when the connection ended; seconds since 1970
    will           blob,
    will_due       real,
    due            real,                     -- when somebody has to look at it: its end, or its will
    subscriptions  blob not null,
    cursors        blob not null,
    packets        blob not null,
    dead           integer not null          -- 1: deleted; kept for a while, so that nothing brings it back
);

-- A write that leaves `due` and `lease` as they are names neither, and so touches neither index.
create index sessions_due on sessions (due) where due is not null;
create index sessions_of_lease on sessions (lease, client_id) where lease is not null;
create index sessions_dead on sessions (left_at) where dead;

-- One row: the last epoch given, the last version of the filters, and up to which version counts of 0 are gone.
create table session_counters (
    epoch            integer not null,
    filters          integer not null,
    filters_trimmed  integer not null
);

insert into session_counters values (0, 0, 0);

-- How many sessions subscribe to each filter. A count of 0 is kept for a while, so that every node hears of it.
create table session_filters (
    filter      text primary key,
    sessions    integer not null,
    version     integer not null,
    changed_at  real not null
) without rowid;

create index session_filters_by_version on session_filters (version);
create index session_filters_unused on session_filters (changed_at) where sessions = 0;

-- QoS 2 publishes that are in the log and were not released yet.
create table session_received (
    client_id  text not null,
    born       text not null,                -- of the session they were sent in
    packet_id  integer not null,
    mark       integer not null,             -- which publish it is, of all that ever had this packet id
    primary key (client_id, born, packet_id)
) without rowid;
