-- The log: generations hold streams, streams hold blocks, blocks have bodies.

create table logs (
    log       text primary key,
    shard_by  text not null check (shard_by in ('publisher', 'topic'))
) without rowid;

create table generations (
    log         text not null,
    generation  integer not null,
    shards      integer not null,
    opened_at   integer not null,          -- microseconds, UTC
    sealed_at   integer,                   -- null: this is the open one
    dropped     integer not null default 0, -- 1: no longer visible, being deleted in steps
    primary key (log, generation)
) without rowid;

create table streams (
    id           integer primary key,
    log          text not null,
    generation   integer not null,
    shard        integer not null,
    next_offset  integer not null default 0,
    bytes        integer not null default 0,
    oldest       integer,                  -- time of the oldest and of the newest message
    newest       integer,
    sealed       integer not null default 0,  -- 1: finalised, nothing will be appended any more
    unique (log, generation, shard)
);

-- The directory: small rows, so that finding a block never reads a body.
create table blocks (
    stream    integer not null,
    base      integer not null,            -- offset of the first message
    messages  integer not null,
    bytes     integer not null,
    newest    integer not null,            -- newest time in this block or any before it: never decreases
    checksum  integer not null,
    body      integer not null,
    primary key (stream, base)
) without rowid;

-- Bodies are only ever added at the end, which is what SQLite does best.
create table bodies (
    id      integer primary key,
    hashes  blob not null,                 -- sorted 32-bit hashes of the topics in it
    data    blob not null                  -- an Arrow IPC stream with one record batch
);

-- A number is never given twice: the last body leaves its number behind, empty. (`autoincrement` would do as much,
-- and write one page more with every append.)
create trigger bodies_keep_the_last_number after delete on bodies
when old.id > (select coalesce(max(id), 0) from bodies)
begin
    insert into bodies values (old.id, x'', x'');
end;

-- Bodies that were merged into others. They are deleted in the order they were written, whatever their stream: that
-- empties pages, where a stream at a time would rewrite each page as often as there are streams.
create table dead_bodies (
    id  integer primary key
);

-- Every topic that ever occurred in a generation: what a wildcard is resolved against.
create table topics (
    log         text not null,
    generation  integer not null,
    topic       text not null,
    primary key (log, generation, topic)
) without rowid;

-- The topic index: runs of blocks, each with which hash occurs in which of them.
create table topic_runs (
    stream  integer not null,
    bucket  integer not null,              -- the top bits of the hash
    level   integer not null,
    first   integer not null,              -- offsets [first, past) are covered
    past    integer not null,
    data    blob not null,
    primary key (stream, bucket, first)
) without rowid;

-- The last append of each writer that asked to be recognised.
create table writers (
    writer      text primary key,
    sequence    integer not null,
    placed      text not null,
    updated_at  integer not null
) without rowid;

-- A topic's last word, for whoever subscribes later. A copy: the log may drop what it was copied from.
create table retained (
    log         text not null,
    topic       text not null,
    payload     blob not null,
    publisher   text not null,
    flags       integer not null,
    properties  blob,
    time        integer not null,
    primary key (log, topic)
) without rowid;
