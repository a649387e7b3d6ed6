-- Fan-out: payloads once, batches as they came, and what waits for each vehicle.

-- Numbers are never given twice: who has one in memory never gets other data for it.
create table fanout_payloads (
    number      integer primary key autoincrement,
    sha1        blob not null unique,
    sha256      blob not null,
    touched_at  real not null,               -- when it was last sent or referred to; seconds since 1970
    data        blob not null
);

create index fanout_payloads_touched on fanout_payloads (touched_at);

create table fanout_campaigns (
    id              integer primary key,
    request_id      text not null,
    number          integer not null,        -- which use of the request id it is
    sha1            blob not null,           -- of its first batch's payload
    state           text not null,           -- running | paused | cancelled | closed
    open            integer not null,        -- 1: batches may join it
    sending         integer not null,        -- 1: deliveries may begin
    waved           integer not null,        -- 1: its rows have tickets,
    cut             integer,                 -- and those up to this one may be sent to
    rate_per_sec    real,
    bytes_per_sec   real,
    in_flight_max   integer,
    awaits_result   integer not null,
    replaces        integer not null,
    version         integer not null,
    settings        blob not null,
    control         blob not null,
    reason          text not null,
    created_at      real not null,
    batch_at        real not null,
    closed_at       real,
    unique (request_id, number)
);

create index fanout_campaigns_open on fanout_campaigns (request_id) where open;
create index fanout_campaigns_closed on fanout_campaigns (closed_at) where closed_at is not null;

-- The last number given to a use of each request id: it stays when the campaigns are gone.
create table fanout_numbers (
    request_id  text primary key,
    number      integer not null
) without rowid;

-- What all deliveries of a batch have in common.
create table fanout_batches (
    seq       integer primary key,
    place     integer not null,              -- lane and seq, by which a vehicle's deliveries are in order
    campaign  integer not null,
    payload   integer not null,
    expires   real not null,
    resend    text not null,
    added_at  real not null
);

create index fanout_batches_of_campaign on fanout_batches (campaign);
create index fanout_batches_of_payload on fanout_batches (payload);

-- VINs of parts, compressed: they stay where they are when a part becomes visible.
create table fanout_ids (
    id    integer primary key,
    data  blob not null
);

create table fanout_staged (
    upload     text not null,
    ids        integer not null,
    count      integer not null,
    staged_at  real not null,
    primary key (upload, ids)
) without rowid;

create index fanout_staged_at on fanout_staged (staged_at);

create table fanout_parts (
    number    integer primary key,           -- in the order in which they became visible
    seq       integer not null,
    campaign  integer not null,
    ids       integer not null,
    count     integer not null,
    merged    integer not null,
    merged_as integer,                       -- in the order in which they were merged
    expires   real                           -- null: never, or nothing of it waits any more
);

create index fanout_parts_merged on fanout_parts (merged_as) where merged_as is not null;

create index fanout_parts_unmerged on fanout_parts (number) where not merged;
create index fanout_parts_of_campaign on fanout_parts (campaign, number);
create index fanout_parts_expires on fanout_parts (expires) where expires is not null;

-- One row: the run of merging that is under way.
create table fanout_merge (
    parts  text not null,                    -- JSON array of numbers; empty: none
    after  text not null
);

insert into fanout_merge values ('[]', '');

-- A million of them: payload and expiry are the batch's.
create table fanout_waiting (
    vin         text not null,
    place       integer not null,
    campaign    integer not null,
    ticket      integer,
    attempts    integer not null default 0,
    not_before  real not null default 0,
    sent        text,
    primary key (vin, place)
) without rowid;

create table fanout_in_flight (
    vin       text primary key,
    place     integer not null,
    campaign  integer not null,
    payload   integer not null,
    expires   real not null,
    attempts  integer not null,
    sent      text not null,
    epoch     integer not null,
    node      text not null,
    lease     integer not null,
    sent_at   real not null
) without rowid;

create table fanout_awaiting (
    vin       text not null,
    place     integer not null,
    campaign  integer not null,
    payload   integer not null,
    attempts  integer not null,
    acked_at  real not null,
    until     real not null,
    primary key (vin, place)
) without rowid;

create index fanout_awaiting_until on fanout_awaiting (until);

create table fanout_ended (
    campaign  integer not null,
    vin       text not null,
    place     integer not null,
    "end"     integer not null,              -- 0 acked, 1 failed, 2 expired, 3 superseded, 4 cancelled
    reason    text not null,
    ended_at  real not null,
    primary key (campaign, vin)
) without rowid;

create index fanout_not_acked on fanout_ended (campaign, vin, "end", reason) where "end" <> 0;

-- How many deliveries of a campaign are where.
create table fanout_counts (
    campaign         integer not null,
    slot             integer not null,
    waiting          integer not null,
    in_flight        integer not null,
    awaiting_result  integer not null,
    acked            integer not null,
    failed           integer not null,
    expired          integer not null,
    superseded       integer not null,
    cancelled        integer not null,
    repeated         integer not null,
    primary key (campaign, slot)
) without rowid;

-- What a campaign with limits may still send, as of a time.
create table fanout_buckets (
    campaign    integer primary key,
    deliveries  real not null,
    bytes       real not null,
    at          real not null
);

create table fanout_keys (
    key      text primary key,
    digest   blob not null,
    answer   blob not null,
    used_at  real not null
) without rowid;

create index fanout_keys_used on fanout_keys (used_at);

-- One row: the last numbers given.
create table fanout_counters (
    seq       integer not null,
    part      integer not null,
    campaign  integer not null,
    merged    integer not null
);

insert into fanout_counters values (0, 0, 0, 0);

-- One row: who controls campaigns.
create table fanout_keeper (
    node   text not null,
    epoch  integer not null,
    until  real not null
);

insert into fanout_keeper values ('', 0, 0);
