-- What wrk sends to an aggregator, for benchmarks/speed/service.py:
--   wrk -s load.lua URL -- KIND QUERIES FIRST STORED TOKEN
-- KIND: "new" posts records that nobody asked before, numbered from FIRST; "stored" asks ids below STORED, which were
-- asked; "mixed" is mostly stored, with reads and two new queries in a hundred. QUERIES: how many in each request.

local kind, queries, number, stored, headers

function init(arguments)
  kind, queries, number, stored = arguments[1], tonumber(arguments[2]), tonumber(arguments[3]), tonumber(arguments[4])
  headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. arguments[5] }
  math.randomseed(number)
end

local function body(query)
  local parts = {}
  for i = 1, queries do
    parts[i] = query()
  end
  return '{"queries":[' .. table.concat(parts, ",") .. "]}"
end

local function new()
  number = number + 1
  return string.format('{"features":[%d.0],"group":"%s"}', number, number % 2 == 0 and "red" or "green")
end

local function known()
  return string.format('{"id":%d}', math.random(0, stored - 1))
end

local function post(query)
  return wrk.format("POST", "/v1/queries", headers, body(query))
end

local function one_of_many()
  local drawn = math.random(100)
  queries = drawn <= 10 and 256 or 1
  if drawn > 98 then
    return post(new)
  elseif drawn > 88 then
    return wrk.format("GET", "/v1/budget", headers)
  elseif drawn > 78 then
    return wrk.format("POST", "/v1/estimate", headers, '{"count": 500}')
  end
  return post(known)
end

function request()
  if kind == "mixed" then
    return one_of_many()
  end
  return post(kind == "new" and new or known)
end

function done(summary, latency)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format('\n{"requests": %d, "seconds": %f, "failed": %d, "p50_ms": %f, "p99_ms": %f}\n',
    summary.requests, summary.duration / 1e6, failed, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
