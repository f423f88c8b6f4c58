// Threads that help the only lane which is busy. A lone small batch then runs on several cores.
//
// A lane that leads opens the team, and helpers spin until it closes. Work is shared in parts whose results do not depend on who
// computes them. Another lane that starts closes the team: the leader goes on alone.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace whimbrel {

constexpr std::int64_t SHARES = 4;  // of a job for each thread: claiming one costs a cache line's way between two cores
constexpr unsigned YIELD_ROUNDS = 64;  // some microseconds

// What one thread writes while others read is on a cache line of its own.
struct Team {
    alignas(64) std::atomic<std::int32_t> open{0};
    alignas(64) std::atomic<std::uint32_t> job{0};  // odd while there is one
    alignas(64) std::atomic<std::int64_t> next{0};
    alignas(64) std::atomic<std::int32_t> inside{0};  // helpers that may be at work
    alignas(64) std::atomic<bool> failed{false};
    std::atomic<std::int64_t> members{1};
    std::int64_t count = 0, share = 1;
    void (*run)(void*, std::int64_t, std::int64_t) = nullptr;
    void* context = nullptr;

    void work() {
        try {
            for (std::int64_t first = next.fetch_add(share); first < count; first = next.fetch_add(share))
                run(context, first, std::min(count, first + share));
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    }
};

// Waiting for another thread. It may be due on the same core, so this one gives way now and then.
class Spin {
  public:
    void wait() {
        _mm_pause();
        if (++rounds_ % YIELD_ROUNDS == 0) sched_yield();
    }

  private:
    unsigned rounds_ = 0;
};

inline Team team;
inline std::atomic<bool> led{false};
inline thread_local bool leads = false;

// Run f(first, last) for parts of the numbers below `count`, with the team if this thread leads it. Throws std::bad_alloc.
template <class F>
void in_parallel(std::int64_t count, F& f) {
    if (!leads || count < 2 || !team.open.load()) return f(0, count);
    team.count = count, team.share = std::max<std::int64_t>(1, count / (SHARES * team.members)), team.context = &f, team.failed = false;
    team.run = [](void* context, std::int64_t first, std::int64_t last) { (*static_cast<F*>(context))(first, last); };
    team.next = 0;
    team.job.fetch_add(1);
    team.work();
    team.job.fetch_add(1);  // who comes now finds none
    for (Spin spin; team.inside.load();) spin.wait();
    if (team.failed) throw std::bad_alloc();
}

// Become the leader and wake the helpers. False if another thread leads.
inline bool open_team() {
    bool none = false;
    if (!led.compare_exchange_strong(none, true)) return false;
    leads = true;
    team.open = 1;
    syscall(SYS_futex, reinterpret_cast<std::int32_t*>(&team.open), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    return true;
}

inline void leave_team() {
    team.open = 0;
    leads = false;
    led = false;
}

// Help until the process ends.
inline void help_team() {
    team.members.fetch_add(1);
    for (;;) {
        while (!team.open.load()) syscall(SYS_futex, reinterpret_cast<std::int32_t*>(&team.open), FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        for (Spin spin; team.open.load();) {
            const std::uint32_t job = team.job.load();
            if (job % 2 == 0) {
                spin.wait();
                continue;
            }
            team.inside.fetch_add(1);
            if (team.job.load() == job) team.work();
            team.inside.fetch_sub(1);
        }
    }
}

}  // namespace whimbrel
