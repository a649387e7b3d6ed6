-- The log: generations hold streams, streams hold blocks, blocks have bodies.

create table logs (
    log       text primary key,
    shard_by  text not null check (shard_by in ('publisher', 'topic'))
);

create table generations (
    log         text not null,
    generation  bigint not null,
    shards      bigint not null,
    opened_at   bigint not null,          -- microseconds, UTC
    sealed_at   bigint,                   -- null: this is the open one
    dropped     bigint not null default 0, -- 1: no longer visible, being deleted in steps
    primary key (log, generation)
);

create table streams (
    id           bigint generated always as identity primary key,
    log          text not null,
    generation   bigint not null,
    shard        bigint not null,
    next_offset  bigint not null default 0,
    bytes        bigint not null default 0,
    oldest       bigint,                  -- time of the oldest and of the newest message
    newest       bigint,
    sealed       bigint not null default 0,  -- 1: finalised, nothing will be appended any more
    unique (log, generation, shard)
);

-- The directory: small rows, so that finding a block never reads a body.
create table blocks (
    stream    bigint not null,
    base      bigint not null,            -- offset of the first message
    messages  bigint not null,
    bytes     bigint not null,
    newest    bigint not null,            -- newest time in this block or any before it: never decreases
    checksum  bigint not null,
    body      bigint not null,
    primary key (stream, base)
);

-- Bodies are only ever added at the end.
create table bodies (
    id      bigint generated always as identity primary key,
    hashes  bytea not null,                 -- sorted 32-bit hashes of the topics in it
    data    bytea not null                  -- an Arrow IPC stream with one record batch
);

-- Every topic that ever occurred in a generation: what a wildcard is resolved against.
create table topics (
    log         text not null,
    generation  bigint not null,
    topic       text not null
);

-- A topic may be longer than a B-tree entry, so it is known by its hash and found by its beginning.
create unique index topics_once on topics (log, generation, md5(topic));
create index topics_by_prefix on topics (log, generation, left(topic, 250) collate "C");

-- The topic index: runs of blocks, each with which hash occurs in which of them.
create table topic_runs (
    stream  bigint not null,
    bucket  bigint not null,              -- the top bits of the hash
    level   bigint not null,
    first   bigint not null,              -- offsets [first, past) are covered
    past    bigint not null,
    data    bytea not null,
    primary key (stream, bucket, first)
);

-- The last append of each writer that asked to be recognised.
create table writers (
    writer      text primary key,
    sequence    bigint not null,
    placed      text not null,
    updated_at  bigint not null
);

-- Bodies are written once and read whole: compressing them would only cost time.
alter table bodies alter column data set storage external;
alter table bodies alter column hashes set storage external;
alter table topic_runs alter column data set storage external;

-- A topic's last word, for whoever subscribes later. A copy: the log may drop what it was copied from.
create table retained (
    log         text not null,
    topic       text not null,
    payload     bytea not null,
    publisher   text not null,
    flags       bigint not null,
    properties  bytea,
    time        bigint not null
);
create unique index retained_once on retained (log, md5(topic));
