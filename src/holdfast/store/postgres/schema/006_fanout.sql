-- Fan-out: payloads once, batches as they came, and what waits for each vehicle.

-- Numbers are never given twice: who has one in memory never gets other data for it.
create table fanout_payloads (
    number      bigint generated always as identity primary key,
    sha1        bytea not null unique,
    sha256      bytea not null,
    touched_at  double precision not null,   -- when it was last sent or referred to; seconds since 1970
    data        bytea not null
);

alter table fanout_payloads alter column data set storage external;

create index fanout_payloads_touched on fanout_payloads (touched_at);

create table fanout_campaigns (
    id             bigint primary key,
    request_id     text collate "C" not null,
    number         bigint not null,          -- which use of the request id it is
    sha1           bytea not null,           -- of its first batch's payload
    state          text not null,            -- running | paused | cancelled | closed
    open           boolean not null,         -- batches may join it
    sending        boolean not null,         -- deliveries may begin
    waved          boolean not null,         -- its rows have tickets,
    cut            bigint,                   -- and those up to this one may be sent to
    rate_per_sec   double precision,
    bytes_per_sec  double precision,
    in_flight_max  bigint,
    awaits_result  boolean not null,
    replaces       boolean not null,
    version        bigint not null,
    settings       bytea not null,
    control        bytea not null,
    reason         text not null,
    created_at     double precision not null,
    batch_at       double precision not null,
    closed_at      double precision,
    unique (request_id, number)
);

create index fanout_campaigns_open on fanout_campaigns (request_id) where open;
create index fanout_campaigns_closed on fanout_campaigns (closed_at) where closed_at is not null;

-- The last number given to a use of each request id: it stays when the campaigns are gone.
create table fanout_numbers (
    request_id  text collate "C" primary key,
    number      bigint not null
);

-- What all deliveries of a batch have in common.
create table fanout_batches (
    seq       bigint primary key,
    place     bigint not null,               -- lane and seq, by which a vehicle's deliveries are in order
    campaign  bigint not null,
    payload   bigint not null,
    expires   double precision not null,
    resend    text not null,
    added_at  double precision not null
);

create index fanout_batches_of_campaign on fanout_batches (campaign);
create index fanout_batches_of_payload on fanout_batches (payload);

-- VINs of parts, compressed: they stay where they are when a part becomes visible.
create table fanout_ids (
    id    bigint generated always as identity primary key,
    data  bytea not null
);

create table fanout_staged (
    upload     text collate "C" not null,
    ids        bigint not null,
    count      bigint not null,
    staged_at  double precision not null,
    primary key (upload, ids)
);

create index fanout_staged_at on fanout_staged (staged_at);

create table fanout_parts (
    number    bigint primary key,            -- in the order in which they became visible
    seq       bigint not null,
    campaign  bigint not null,
    ids       bigint not null,
    count     bigint not null,
    merged    boolean not null,
    merged_as bigint,                        -- in the order in which they were merged
    expires   double precision               -- null: never, or nothing of it waits any more
);

create index fanout_parts_merged on fanout_parts (merged_as) where merged_as is not null;
create index fanout_parts_unmerged on fanout_parts (number) where not merged;
create index fanout_parts_of_campaign on fanout_parts (campaign, number);
create index fanout_parts_expires on fanout_parts (expires) where expires is not null;

-- One row: the run of merging that is under way.
create table fanout_merge (
    parts  text not null,                    -- JSON array of numbers; empty: none
    after  text collate "C" not null
);

insert into fanout_merge values ('[]', '');

-- A million of them: payload and expiry are the batch's.
create table fanout_waiting (
    vin         text collate "C" not null,
    place       bigint not null,
    campaign    bigint not null,
    ticket      bigint,
    attempts    bigint not null default 0,
    not_before  double precision not null default 0,
    sent        text,
    primary key (vin, place)
);

create table fanout_in_flight (
    vin       text collate "C" primary key,
    place     bigint not null,
    campaign  bigint not null,
    payload   bigint not null,
    expires   double precision not null,
    attempts  bigint not null,
    sent      text not null,
    epoch     bigint not null,
    node      text not null,
    lease     bigint not null,
    sent_at   double precision not null
);

create table fanout_awaiting (
    vin       text collate "C" not null,
    place     bigint not null,
    campaign  bigint not null,
    payload   bigint not null,
    attempts  bigint not null,
    acked_at  double precision not null,
    until     double precision not null,
    primary key (vin, place)
);

create index fanout_awaiting_until on fanout_awaiting (until);

create table fanout_ended (
    campaign  bigint not null,
    vin       text collate "C" not null,
    place     bigint not null,
    "end"     smallint not null,             -- 0 acked, 1 failed, 2 expired, 3 superseded, 4 cancelled
    reason    text not null,
    ended_at  double precision not null,
    primary key (campaign, vin)
);

create index fanout_not_acked on fanout_ended (campaign, vin, "end", reason) where "end" <> 0;

-- How many deliveries of a campaign are where: the sum over its slots. Processes have different ones, and so seldom
-- wait for each other.
create table fanout_counts (
    campaign         bigint not null,
    slot             bigint not null,
    waiting          bigint not null,
    in_flight        bigint not null,
    awaiting_result  bigint not null,
    acked            bigint not null,
    failed           bigint not null,
    expired          bigint not null,
    superseded       bigint not null,
    cancelled        bigint not null,
    repeated         bigint not null,
    primary key (campaign, slot)
) with (fillfactor = 50);

-- What a campaign with limits may still send, as of a time.
create table fanout_buckets (
    campaign    bigint primary key,
    deliveries  double precision not null,
    bytes       double precision not null,
    at          double precision not null
);

create table fanout_keys (
    key      text collate "C" primary key,
    digest   bytea not null,
    answer   bytea not null,
    used_at  double precision not null
);

create index fanout_keys_used on fanout_keys (used_at);

-- One row: the last numbers given.
create table fanout_counters (
    seq       bigint not null,
    part      bigint not null,
    campaign  bigint not null,
    merged    bigint not null
);

insert into fanout_counters values (0, 0, 0, 0);

-- One row: who controls campaigns.
create table fanout_keeper (
    node   text not null,
    epoch  bigint not null,
    until  double precision not null
);

insert into fanout_keeper values ('', 0, 0);
