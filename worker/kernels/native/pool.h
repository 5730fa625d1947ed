// Threads that run a list of phases, each of which is a number of chunks that may run in any order.
//
// Whoever has time takes the next chunk, so a thread that the system does not run holds up nobody but with a chunk that
// it has in hand. The caller is one of the threads: alone it gets through everything. Nobody waits for a thread to
// arrive, neither at the beginning nor at the end; those that come late find nothing left to do.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>


struct Phase {
    void (*run)(const void *task, int chunk, int thread);
    const void *task;
    int chunks;
};

// Where a chunk of this number works: those that threads take one after the other lie apart, and each thread's own one
// behind the other, as long as they take them in turn.
static inline int place_of(int number, int num_chunks, int num_threads) {
    const int lane = number % num_threads, rest = num_chunks % num_threads;
    return lane * (num_chunks / num_threads) + std::min(lane, rest) + number / num_threads;
}

// A number whose changes threads wait for, asleep at once. The standard library's wait calls sched_yield before it
// sleeps, which Linux may take for a whole slice of time used: beside busy processes a thread of the model would come
// last for milliseconds, where one that slept comes first.
class Awaited {
  public:
    std::atomic<int> value{0};

    // Until it may have changed from `seen`.
    void wait(int seen) {
        num_asleep_.fetch_add(1);
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        num_asleep_.fetch_sub(1);
    }

    // After a change. Whoever is not counted yet will see the change, and not sleep.
    void notify() {
        if (num_asleep_.load() > 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

  private:
    std::atomic<int> num_asleep_{0};
};

class Pool {
  public:
    explicit Pool(int num_threads) : num_threads_(num_threads) {
        for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { serve(thread); });
    }

    ~Pool() {
        stopping_ = true;
        round_.value.fetch_add(1);
        round_.notify();
        for (auto &thread : threads_) thread.join();
    }

    int num_threads() const { return num_threads_; }

    // All phases, one after the other. Callers take turns.
    void run(const std::vector<Phase> &phases) {
        std::lock_guard lock(mutex_);
        Job &job = free_job();
        job.prepare(phases);
        job.is_open = true;
        current_ = &job;
        if (num_threads_ > 1) {
            round_.value.fetch_add(1);
            round_.notify();
        }
        job.work(0);
        job.is_open = false;
    }

  private:
    struct alignas(64) State {
        std::atomic<int> next{0};
        alignas(64) Awaited left;
    };

    // A job's memory is used again only when no thread is inside.
    struct Job {
        std::atomic<int> inside{0};
        std::atomic<bool> is_open{false};
        std::vector<Phase> phases;
        std::unique_ptr<State[]> states;
        size_t num_states = 0;

        void prepare(const std::vector<Phase> &wanted) {
            phases = wanted;
            if (num_states < wanted.size()) {
                num_states = wanted.size();
                states = std::make_unique<State[]>(num_states);
            }
            for (size_t i = 0; i < wanted.size(); i++) {
                states[i].next.store(0, std::memory_order_relaxed);
                states[i].left.value.store(wanted[i].chunks, std::memory_order_relaxed);
            }
        }

        void work(int thread) {
            for (size_t i = 0; i < phases.size(); i++) {
                const Phase &phase = phases[i];
                State &state = states[i];
                int chunk;
                while ((chunk = state.next.fetch_add(1)) < phase.chunks) {
                    phase.run(phase.task, chunk, thread);
                    if (state.left.value.fetch_sub(1) == 1) state.left.notify();
                }
                wait_for(state.left);
            }
        }

        // A little while awake, since a chunk takes microseconds; then asleep, since its thread may not be running.
        static void wait_for(Awaited &left) {
            for (int i = 0; i < 400; i++) {
                if (left.value.load() <= 0) return;
                __builtin_ia32_pause();
            }
            for (int now = left.value.load(); now > 0; now = left.value.load()) left.wait(now);
        }
    };

    Job &free_job() {
        for (auto &job : jobs_)
            if (job->inside == 0) return *job;
        jobs_.push_back(std::make_unique<Job>());
        return *jobs_.back();
    }

    void serve(int thread) {
        int seen = 0;
        while (true) {
            while (round_.value.load() == seen) round_.wait(seen);
            seen = round_.value.load();
            if (stopping_) return;
            Job *job = current_;
            if (job == nullptr) continue;
            // In this order: whoever takes the job's memory has closed it before, and looks who is inside after.
            job->inside++;
            if (job->is_open) job->work(thread);
            job->inside--;
        }
    }

    const int num_threads_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Job>> jobs_;
    std::atomic<Job *> current_{nullptr};
    Awaited round_;
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};
