// The CUDA that TileLang writes for a Hopper kernel, run by ordinary threads: one host thread for each thread of a block, one block or cluster at a
// time. Barriers, votes and shared memory behave as on the GPU; a matrix instruction is done at once by the thread that issues it, each thread its
// own sums, reading shared memory through the descriptors and their 128-byte swizzle. So numbers, hangs and (under a thread sanitizer) missing
// barriers show without a GPU; speed, registers and memory ordering between the proxies do not.
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

typedef unsigned char uchar;
typedef unsigned int uint;
typedef _Float16 half_t;
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() {}
  bfloat16_t(float f) { uint32_t u; memcpy(&u, &f, 4); bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
  operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
};
typedef bfloat16_t __nv_bfloat16;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint1 { unsigned x; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct __nv_bfloat162 { bfloat16_t x, y; };
struct half2 { half_t x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
static inline half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
static inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return a.bits | unsigned(b.bits) << 16; }
static inline unsigned __pack_half2(bfloat16_t a, bfloat16_t b) { return a.bits | unsigned(b.bits) << 16; }
template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
#define CUDART_INF_F INFINITY
#define __popc __builtin_popcount

static const int THREADS = 384;

struct Sync {     // of a fixed number of threads, again and again
  std::mutex m; std::condition_variable c; int there = 0, phase = 0;
  void wait(int all) {
    std::unique_lock<std::mutex> lock(m);
    int mine = phase;
    if (++there == all) { there = 0; ++phase; c.notify_all(); }
    else c.wait(lock, [&] { return phase != mine; });
  }
};

struct Barrier {  // mbarrier; a wait that lasts two minutes is a hang
  std::mutex m; std::condition_variable c; int count = -1, pending = 0, phase = 0; std::string name;
  void init(int n) { count = pending = n; }
  void arrive() {
    std::unique_lock<std::mutex> lock(m);
    if (pending <= 0) { printf("too many arrivals at %s\n", name.c_str()); fflush(stdout); _exit(4); }
    if (--pending == 0) { pending = count; ++phase; c.notify_all(); }
  }
  void wait(int parity) {
    std::unique_lock<std::mutex> lock(m);
    if (c.wait_for(lock, std::chrono::seconds(120), [&] { return (phase & 1) != parity; })) return;
    printf("hang at %s: parity %d, phase %d, %d arrivals missing\n", name.c_str(), parity, phase, pending); fflush(stdout); _exit(3);
  }
};

struct Warp { Sync sync; uint64_t slot[32]; };
struct Block { uchar* shared; std::map<std::string, std::unique_ptr<Barrier[]>> barriers; std::mutex m; Sync all, named[16]; Warp warps[THREADS / 32]; };
struct Cluster { std::vector<std::unique_ptr<Block>> blocks; Sync all; };
struct Index { int x, y, z; };
static thread_local Index threadIdx, blockIdx;
static thread_local Block* block;
static thread_local Cluster* cluster;

static Barrier* barriers_called(const char* name, int n) {
  std::lock_guard<std::mutex> lock(block->m);
  auto& found = block->barriers[name];
  if (!found) { found.reset(new Barrier[n]); for (int i = 0; i < n; ++i) found[i].name = std::string(name) + "[" + std::to_string(i) + "]"; }
  return found.get();
}
static void __syncthreads() { block->all.wait(THREADS); }
static Warp& my_warp() { return block->warps[threadIdx.x / 32]; }
static uint64_t exchange(uint64_t value, int from) {
  Warp& w = my_warp();
  w.slot[threadIdx.x % 32] = value; w.sync.wait(32);
  uint64_t got = w.slot[from]; w.sync.wait(32);
  return got;
}
static unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  Warp& w = my_warp();
  w.slot[threadIdx.x % 32] = vote; w.sync.wait(32);
  for (int i = 0; i < 32; ++i) votes |= unsigned(w.slot[i]) << i;
  w.sync.wait(32);
  return votes;
}

namespace tl {
enum class DataType { kBFloat16, kFloat16, kFloat32 };
struct MaxOp { static float of(float a, float b) { return a > b ? a : b; } };
struct SumOp { static float of(float a, float b) { return a + b; } };
template <int N> struct NamedBarrier {};
template <class Op, int threads, int scale, int offset, class B> struct AllReduce {
  static_assert(threads == 4 && scale == 1);
  static float run(float v) {
    for (int d = 2; d; d >>= 1) {
      uint32_t mine, other; memcpy(&mine, &v, 4);
      other = uint32_t(exchange(mine, (threadIdx.x % 32) ^ d));
      float f; memcpy(&f, &other, 4); v = Op::of(v, f);
    }
    return v;
  }
};
template <int> bool tl_shuffle_elect() { return threadIdx.x == 0; }
static void fence_barrier_init() {}
static void fence_proxy_async() {}
static void warpgroup_arrive() {}
static void warpgroup_commit_batch() {}
template <int> void wait_wgmma() {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
template <class T> void warpgroup_fence_operand(T*, int) {}
static void cluster_sync() { cluster->all.wait(THREADS * int(cluster->blocks.size())); }
static void __sync_thread_partial(int id, int n) { block->named[id].wait(n); }
static void mbarrier_cp_async_arrive_noinc(Barrier& b) { b.arrive(); }
template <int N> void cp_async_gs_conditional(const void* to, const void* from, bool there) {
  if (there) memcpy(const_cast<void*>(to), from, N); else memset(const_cast<void*>(to), 0, N);
}
static void ptx_stmatrix_m8n8_x4(const void* row, unsigned v0, unsigned v1, unsigned v2, unsigned v3) {
  unsigned v[4] = {v0, v1, v2, v3};
  int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(reinterpret_cast<uchar*>(exchange(reinterpret_cast<uint64_t>(row), i * 8 + lane / 4)) + lane % 4 * 4, v + i, 4);
}

struct GmmaDescriptor {   // addresses and steps in units of 16 bytes
  uint64_t at = 0; int lead = 0, stride = 0;
  GmmaDescriptor operator+(int n) const { auto d = *this; d.at += n; return d; }
  explicit operator uint64_t() const { return at | uint64_t(lead) << 32 | uint64_t(stride) << 48; }
};
template <class T> void increase_descriptor_offset(GmmaDescriptor& d, T bytes) { d.at += bytes >> 4; }
template <int layout, int lead, int stride> void initialize_wgmma_descriptor(GmmaDescriptor& d, const void* p) {
  static_assert(layout == 1);                                                   // 128-byte swizzle
  size_t offset = static_cast<const uchar*>(p) - block->shared;
  if (offset % 1024) { printf("a matrix at %zu, not at a multiple of 1,024\n", offset); fflush(stdout); _exit(5); }
  d.at = offset >> 4; d.lead = lead; d.stride = stride;
}
template <DataType type> float value_at(size_t address) {
  const uchar* p = block->shared + (address ^ (((address >> 7) & 7) << 4));
  if constexpr (type == DataType::kBFloat16) return *reinterpret_cast<const bfloat16_t*>(p);
  else return *reinterpret_cast<const half_t*>(p);
}
template <DataType ta, DataType tb, DataType tc, int M, int N, int K, bool turned_a, bool turned_b, int sign_a, int sign_b>
void wgmma_ss(uint64_t da, uint64_t db, uint32_t* sums, int) {
  static_assert(ta == tb && M == 64 && K == 16 && !turned_a && sign_a == 1 && sign_b == 1);
  float* c = reinterpret_cast<float*>(sums);
  int t = threadIdx.x % 128, lane = t % 32;
  size_t at_a = (da & 0xffffffff) << 4, at_b = (db & 0xffffffff) << 4, lead_b = ((db >> 32) & 0xffff) << 4, step_a = (da >> 48) << 4, step_b = (db >> 48) << 4;
  float a[2][16], b[16];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 16; ++k) { int m = t / 32 * 16 + lane / 4 + 8 * i; a[i][k] = value_at<ta>(at_a + m / 8 * step_a + m % 8 * 128 + k * 2); }
  for (int n8 = 0; n8 < N / 8; ++n8)
    for (int j = 0; j < 2; ++j) {
      int n = n8 * 8 + lane % 4 * 2 + j;
      for (int k = 0; k < 16; ++k)
        b[k] = value_at<tb>(turned_b ? at_b + n / 64 * lead_b + k / 8 * step_b + k % 8 * 128 + n % 64 * 2 : at_b + n / 8 * step_b + n % 8 * 128 + k * 2);
      for (int i = 0; i < 2; ++i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k];
        c[n8 * 4 + i * 2 + j] += sum;
      }
    }
}
}  // namespace tl

// What the kernels' own CUDA functions do, without their instructions.
static const uchar* at_rank(const void* p, int rank) { return cluster->blocks[rank]->shared + (static_cast<const uchar*>(p) - block->shared); }
static float peek(const void* at, int rank) { float f; memcpy(&f, at_rank(at, rank), 4); return f; }
static int staged(int wide, int h, int d) { return h * wide + (d ^ (h & 7) << 3); }
static void stage(void* base, int wide, int h, int d, float value) { static_cast<bfloat16_t*>(base)[staged(wide, h, d)] = bfloat16_t(value); }
static void peek8(void* to, const void* base, int wide, int h, int d, int rank) { memcpy(to, at_rank(static_cast<const uint16_t*>(base) + staged(wide, h, d), rank), 16); }
static void peek_tile(void* to, const void* base, int h, int d, int rank) {
  memcpy(to, at_rank(static_cast<const uint16_t*>(base) + (d >> 6) * 4096 + h * 64 + ((((d >> 3) & 7) ^ (h & 7)) << 3), rank), 16);
}
template <class T> void add8_of(void* sum, float share, const void* from) {
  for (int i = 0; i < 8; ++i) static_cast<float*>(sum)[i] += share * float(static_cast<const T*>(from)[i]);
}
static void add8(void* sum, float share, const void* from) { add8_of<bfloat16_t>(sum, share, from); }
static void add8_bfloat16(void* sum, float share, const void* from) { add8_of<bfloat16_t>(sum, share, from); }
static void add8_float16(void* sum, float share, const void* from) { add8_of<half_t>(sum, share, from); }
static void to_float16(void* base, int index, float factor) {
  uint16_t* at = static_cast<uint16_t*>(base) + index * 8;
  for (int i = 0; i < 8; ++i) { bfloat16_t b; memcpy(&b, at + i, 2); half_t h = half_t(float(b) * factor); memcpy(at + i, &h, 2); }
}
static void take8(void* to, const void* from, bool there) { if (there) memcpy(to, from, 8); else memset(to, 0, 8); }
static void take16(void* to, const void* from, bool there) { if (there) memcpy(to, from, 16); else memset(to, 0, 16); }
static half_t from_e4m3(unsigned b) {
  int e = b >> 3 & 15, m = b & 7;
  float v = (b & 127) == 127 ? NAN : e ? ldexpf(1 + m / 8.f, e - 7) : ldexpf(m / 8.f, -6);
  return half_t(b & 128 ? -v : v);
}
static void expand8(void* to, const void* from, int piece) {
  const unsigned* v = static_cast<const unsigned*>(from);
  float scale; memcpy(&scale, v + 16 + piece / 2, 4);
  for (int i = 0; i < 8; ++i) static_cast<half_t*>(to)[i] = from_e4m3(v[2 * piece + i / 4] >> 8 * (i % 4) & 255) * half_t(scale * 16);
}
static void rope8(void* to, const void* from) {
  const bfloat16_t* v = reinterpret_cast<const bfloat16_t*>(static_cast<const unsigned*>(from) + 20);
  for (int i = 0; i < 8; ++i) static_cast<half_t*>(to)[i] = half_t(float(v[i]));
}

// Run `kernel` for every cluster of `parts` blocks. Shared memory starts as nan.
template <class Kernel> void run_clusters(int clusters, int parts, Kernel kernel) {
  const size_t room = 227 * 1024;
  for (int y = 0; y < clusters; ++y) {
    Cluster here;
    for (int p = 0; p < parts; ++p) {
      here.blocks.emplace_back(new Block);
      here.blocks[p]->shared = static_cast<uchar*>(aligned_alloc(1024, room));
      memset(here.blocks[p]->shared, 0xff, room);
    }
    std::vector<std::thread> threads;
    for (int p = 0; p < parts; ++p)
      for (int t = 0; t < THREADS; ++t)
        threads.emplace_back([&, p, t] { threadIdx = {t, 0, 0}; blockIdx = {p, y, 0}; cluster = &here; block = here.blocks[p].get(); kernel(); });
    for (auto& thread : threads) thread.join();
    for (auto& b : here.blocks) free(b->shared);
  }
}

static std::vector<char> read_file(const char* name) {
  FILE* f = fopen(name, "rb");
  fseek(f, 0, SEEK_END); std::vector<char> bytes(ftell(f)); rewind(f);
  if (fread(bytes.data(), 1, bytes.size(), f) != bytes.size()) _exit(6);
  fclose(f);
  return bytes;
}
static void write_file(const char* name, const std::vector<char>& bytes) { FILE* f = fopen(name, "wb"); fwrite(bytes.data(), 1, bytes.size(), f); fclose(f); }
