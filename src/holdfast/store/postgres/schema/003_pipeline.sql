-- The pipeline: what tasks have staged, what has landed, and what the lake holds.

-- Blocks of jobs that have not committed. Their bodies are in place; nothing refers to them but this.
create table staged (
    id         bigint generated always as identity primary key,
    log        text not null,
    writer     text not null,              -- a streaming query, or a named write
    batch      bigint not null,
    task       text not null,              -- one attempt at one partition; no two share a name
    place      bigint not null,           -- the order in which a partition's blocks follow one another
    shards     bigint not null,           -- of how many shards `shard` is one
    shard      bigint not null,
    messages   bigint not null,
    bytes      bigint not null,
    oldest     bigint not null,
    newest     bigint not null,
    checksum   bigint not null,
    body       bigint not null,
    topics     text not null,              -- a JSON list: those that occur in it
    staged_at  bigint not null
);
create index staged_by_writer on staged (writer, batch);

-- What has landed: per writer the last batch. A batch that is not newer than it has landed before.
create table ledger (
    log         text not null,
    writer      text not null,
    batch       bigint not null,
    position    text,                      -- where whoever wrote it goes on
    updated_at  bigint not null,
    primary key (log, writer)
);

-- Where a log's lake is.
create table lakes (
    log   text primary key,
    root  text not null
);

-- The manifest: a file that is not in here does not count.
create table lake_files (
    id          bigint generated always as identity primary key,
    log         text not null,
    generation  bigint not null,
    date        text not null,
    path        text not null unique,      -- below the lake's root
    messages    bigint not null,
    bytes       bigint not null,
    oldest      bigint not null,
    newest      bigint not null
);
create index lake_files_by_log on lake_files (log, generation);

-- Which offsets of which stream are in a file: `messages` of them, from `first` to before `past`.
create table lake_parts (
    log         text not null,
    generation  bigint not null,
    shard       bigint not null,
    first       bigint not null,
    file        bigint not null,
    past        bigint not null,
    messages    bigint not null,
    primary key (log, generation, shard, first, file)
);

-- How far the lake has come in each stream: everything before `past` is in it, once.
create table lake_streams (
    log         text not null,
    generation  bigint not null,
    shard       bigint not null,
    past        bigint not null,
    bytes       bigint not null,
    oldest      bigint,
    newest      bigint,
    checksum    bigint,                   -- of the whole stream, once it has been verified
    primary key (log, generation, shard)
);

-- Generations that were compared with the store, message by message: these may be dropped from it.
create table lake_generations (
    log          text not null,
    generation   bigint not null,
    shards       bigint not null,
    opened_at    bigint not null,
    sealed_at    bigint not null,
    messages     bigint not null,
    verified_at  bigint not null,
    primary key (log, generation)
);
