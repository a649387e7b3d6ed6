-- The pipeline: what tasks have staged, what has landed, and what the lake holds.

-- Blocks of jobs that have not committed. Their bodies are in place; nothing refers to them but this.
create table staged (
    id         integer primary key,
    log        text not null,
    writer     text not null,              -- a streaming query, or a named write
    batch      integer not null,
    task       text not null,              -- one attempt at one partition; no two share a name
    place      integer not null,           -- the order in which a partition's blocks follow one another
    shards     integer not null,           -- of how many shards `shard` is one
    shard      integer not null,
    messages   integer not null,
    bytes      integer not null,
    oldest     integer not null,
    newest     integer not null,
    checksum   integer not null,
    body       integer not null,
    topics     text not null,              -- a JSON list: those that occur in it
    staged_at  integer not null
);
create index staged_by_writer on staged (writer, batch);

-- What has landed: per writer the last batch. A batch that is not newer than it has landed before.
create table ledger (
    log         text not null,
    writer      text not null,
    batch       integer not null,
    position    text,                      -- where whoever wrote it goes on
    updated_at  integer not null,
    primary key (log, writer)
) without rowid;

-- Where a log's lake is.
create table lakes (
    log   text primary key,
    root  text not null
) without rowid;

-- The manifest: a file that is not in here does not count.
create table lake_files (
    id          integer primary key,
    log         text not null,
    generation  integer not null,
    date        text not null,
    path        text not null unique,      -- below the lake's root
    messages    integer not null,
    bytes       integer not null,
    oldest      integer not null,
    newest      integer not null
);
create index lake_files_by_log on lake_files (log, generation);

-- Which offsets of which stream are in a file: `messages` of them, from `first` to before `past`.
create table lake_parts (
    log         text not null,
    generation  integer not null,
    shard       integer not null,
    first       integer not null,
    file        integer not null,
    past        integer not null,
    messages    integer not null,
    primary key (log, generation, shard, first, file)
) without rowid;

-- How far the lake has come in each stream: everything before `past` is in it, once.
create table lake_streams (
    log         text not null,
    generation  integer not null,
    shard       integer not null,
    past        integer not null,
    bytes       integer not null,
    oldest      integer,
    newest      integer,
    checksum    integer,                   -- of the whole stream, once it has been verified
    primary key (log, generation, shard)
) without rowid;

-- Generations that were compared with the store, message by message: these may be dropped from it.
create table lake_generations (
    log          text not null,
    generation   integer not null,
    shards       integer not null,
    opened_at    integer not null,
    sealed_at    integer not null,
    messages     integer not null,
    verified_at  integer not null,
    primary key (log, generation)
) without rowid;
