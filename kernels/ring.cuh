// Ring all-reduce: every rank talks to its two neighbours only, chunks follow each other through slots.
//
// Order any (Patarasuk & Yuan 2009), here for 4 ranks; a round cuts nranks chunks, chunk c ends on rank c:
//
//            reduce-scatter                        all-gather
//   step      0      1      2      3               4      5      6
//   rank 0    send 3 rrs 2  rrs 1  rrcs 0          rcs 3  rcs 2  recv 1
//   rank 1    send 0 rrs 3  rrs 2  rrcs 1          rcs 0  rcs 3  recv 2
//   ...       (rrs: recv_reduce_send, rrcs: recv_reduce_copy_send, rcs: recv_copy_send)
//
// 2(p-1) sends of n/p each. Chunk c is folded in the order c+1, c+2, ..., c, so partials are rounded at every hop.
//
// Order rank: the same links as a chain. Partials travel 0 -> p-1 unrounded, in the accumulator type; rank p-1 rounds;
// results travel on p-1 -> 0 -> ... -> p-2. Up to 2n a rank (more where the accumulator is wider), same bits as
// one_shot and two_shot. Knows nothing of how elements are encoded.
#pragma once

#include "pack.cuh"
#include "primitives.cuh"

namespace gar {

// One link in, one link out, over one set of slots: the steps that the five verbs are made of.
struct RingLink {
  Channel& channel;
  const uint32_t set, previous, next;
  uint64_t send_step, recv_step;

  GAR_MEMBER RingLink(Channel& the_channel, uint32_t the_set)
      : channel(the_channel),
        set(the_set),
        previous((the_channel.rank + the_channel.nranks - 1) % the_channel.nranks),
        next((the_channel.rank + 1) % the_channel.nranks),
        send_step(the_channel.first_step()),
        recv_step(the_channel.first_step()) {}

  // The slots of a link lie on one of its two ends; see Channel::slot.
  GAR_MEMBER void* send_slot() const { return channel.slot(send_step, channel.rank, next, set); }
  GAR_MEMBER const void* recv_slot() const { return channel.slot(recv_step, previous, channel.rank, set); }

  // NOTE ring steps. Thread 0 waits for what this step needs (data from `previous`, a free slot towards `next`), the
  // block meets, moves the data, meets again, and thread 0 tells both neighbours. Words only grow, one step at a time;
  // a slot is written again only after the credit of the step that used it last.
  template <bool Recv, bool Send>
  GAR_MEMBER bool open() {
    bool failed = false;
    if (channel.block.thread() == 0) {
      if (Recv) failed = !channel.await_ready(previous, recv_step, set);
      if (Send) failed = failed || !channel.await_credit(next, send_step, set);
    }
    return !channel.block.sync_or(failed);
  }
  template <bool Recv, bool Send>
  GAR_MEMBER void close() {
    channel.block.sync();
    if (channel.block.thread() == 0) {
      if (Recv) channel.post_credit(previous, recv_step, set);
      if (Send) channel.post_ready(next, send_step, set);
    }
    recv_step += Recv;
    send_step += Send;
  }
};

template <class T, class Op>
struct Ring {
  Channel& channel;
  const GarArgs& args;
  const Range range;
  RingLink link;

  GAR_MEMBER explicit Ring(Channel& the_channel)
      : channel(the_channel),
        args(the_channel.args),
        range(part<typename Element<T>::Storage>({0, args.count}, channel.index, channel.block.count())),
        link(the_channel, 0) {}
  GAR_MEMBER uint64_t rounds() const { return rounds_of(range, args.chunk_count * channel.nranks); }
  // The chunk that ends on rank `owner`: a short last round is cut evenly too.
  GAR_MEMBER Range chunk(uint64_t round, uint32_t owner) const {
    return part<typename Element<T>::Storage>(piece(range, round, args.chunk_count * channel.nranks),
                                              owner % channel.nranks, channel.nranks);
  }
  GAR_MEMBER const void* input(Range c) const { return element<T>(args.input, c.lo); }
  GAR_MEMBER void* output(Range c) const { return element<T>(args.output, c.lo); }

  GAR_MEMBER bool send(Range c) {
    if (!link.open<false, true>()) return false;
    copy<T>(channel.block, link.send_slot(), input(c), c.n);
    link.close<false, true>();
    return true;
  }
  GAR_MEMBER bool recv_reduce_send(Range c) {
    if (!link.open<true, true>()) return false;
    const Held<const void*, 2> from{{link.recv_slot(), input(c)}};
    const Held<void*, 1> to{{link.send_slot()}};
    fold<T, Partial, 2, 1>(channel.block, from, to, channel.nranks, c.n, false);
    link.close<true, true>();
    return true;
  }
  GAR_MEMBER bool recv_reduce_copy_send(Range c) {
    if (!link.open<true, true>()) return false;
    const Held<const void*, 2> from{{link.recv_slot(), input(c)}};
    const Held<void*, 2> to{{output(c), link.send_slot()}};
    fold<T, Op, 2, 2>(channel.block, from, to, channel.nranks, c.n, false);
    link.close<true, true>();
    return true;
  }
  GAR_MEMBER bool recv_copy_send(Range c) {
    if (!link.open<true, true>()) return false;
    const Held<void*, 2> to{{output(c), link.send_slot()}};
    copy_to<T, 2>(channel.block, to, link.recv_slot(), c.n, false);
    link.close<true, true>();
    return true;
  }
  GAR_MEMBER bool recv(Range c) {
    if (!link.open<true, false>()) return false;
    copy<T>(channel.block, output(c), link.recv_slot(), c.n, args.streaming);
    link.close<true, false>();
    return true;
  }
  GAR_MEMBER bool round(uint64_t i) {
    const uint32_t rank = channel.rank, nranks = channel.nranks;
    bool going = send(chunk(i, rank + nranks - 1));
    for (uint32_t j = 2; j < nranks && going; ++j) going = recv_reduce_send(chunk(i, rank + nranks - j));
    going = going && recv_reduce_copy_send(chunk(i, rank));
    for (uint32_t j = 1; j + 1 < nranks && going; ++j) going = recv_copy_send(chunk(i, rank + nranks - j));
    return going && recv(chunk(i, rank + 1));
  }

 private:
  // A hop before the last: combines, does not divide.
  struct Partial : Op {
    template <class A, class L>
    static GAR_MEMBER L finish(const L& a, uint32_t) {
      return a;
    }
  };
};

template <class T, class Op>
GAR_DEVICE bool ring(const Block& block, const GarArgs& args) {
  Channel channel(block, args);
  if (!channel.begin()) return false;
  Ring<T, Op> ring(channel);
  const uint64_t rounds = ring.rounds();
  for (uint64_t i = 0; i < rounds; ++i)
    if (!ring.round(i)) return false;
  return channel.end(ring.link.send_step - channel.first_step());
}

// One hop of the chain: the partial that came (accumulators) combined with this rank's elements. First has no partial;
// Last rounds, and stores elements to two places; the others store accumulators to `to`.
// U packs, `stride` apart, are loaded before the first is used.
template <class T, class Op, bool First, bool Last, int N, int U>
GAR_DEVICE void chain_packs(const void* partial, const void* input, void* to, void* also_to, uint32_t nranks,
                            uint64_t pack, uint64_t stride) {
  typedef Element<T> X;
  typedef typename X::Storage S;
  typedef typename X::Accumulator A;
  Lanes<S, N> raw[U];
  Lanes<A, N> came[U];
  GAR_UNROLL for (int u = 0; u < U; ++u) {
    raw[u] = load_lanes<S, N>(input, pack + u * stride);
    if constexpr (!First) came[u] = load_lanes<A, N>(partial, pack + u * stride);
  }
  GAR_UNROLL for (int u = 0; u < U; ++u) {
    auto sum = X::template widen<N>(raw[u]);
    if constexpr (!First) sum = Op::combine(came[u], sum);
    if constexpr (Last) {
      sum = Op::template finish<A>(sum, nranks);
      const Lanes<S, N> result = X::template round<N>(sum);
      store_lanes<S, N>(to, pack + u * stride, result);
      store_lanes<S, N>(also_to, pack + u * stride, result);
    } else {
      store_lanes<A, N>(to, pack + u * stride, sum);
    }
  }
}

template <class T, class Op>
struct Chain {
  enum { kPartials = 0, kResults = 1 };
  typedef typename Element<T>::Storage S;
  typedef typename Element<T>::Accumulator A;
  Channel& channel;
  const GarArgs& args;
  const Range range;
  RingLink partials, results;

  GAR_MEMBER explicit Chain(Channel& the_channel)
      : channel(the_channel),
        args(the_channel.args),
        range(part<S>({0, args.count}, channel.index, channel.block.count())),
        partials(the_channel, kPartials),
        results(the_channel, kResults) {}
  GAR_MEMBER uint64_t rounds() const { return rounds_of(range, args.chunk_count); }
  GAR_MEMBER bool first() const { return channel.rank == 0; }
  GAR_MEMBER bool last() const { return channel.rank + 1 == channel.nranks; }

  template <bool First, bool Last>
  GAR_MEMBER void hop(Range c) {
    constexpr int N = lanes_in_pack<T>();
    const void* partial = First ? nullptr : partials.recv_slot();
    const void* input = element<T>(args.input, c.lo);
    void* to = Last ? results.send_slot() : partials.send_slot();
    void* also_to = Last ? element<T>(args.output, c.lo) : nullptr;
    // Slots are aligned; the user's arrays decide whether packs may be used.
    const bool whole =
        !kVectorsNeedAlignment || (pack_misalignment(input) == 0 && (!Last || pack_misalignment(also_to) == 0));
    const uint64_t packs = whole ? c.n / N : 0, thread = channel.block.thread(), stride = channel.block.threads();
    constexpr int kWide = sizeof(A) / sizeof(S);  // vectors of accumulators to one of elements
    constexpr int U = packs_together(First ? kWide : 1 + kWide);
    const Tiles tiles = tiles_of<U>(channel.block, packs);
    for (uint64_t i = tiles.first; i < tiles.end; i += tiles.step)
      chain_packs<T, Op, First, Last, N, U>(partial, input, to, also_to, channel.nranks, i, kGroupThreads);
    for (uint64_t i = tiles.end + thread; i < packs; i += stride)
      chain_packs<T, Op, First, Last, N, 1>(partial, input, to, also_to, channel.nranks, i, 0);
    for (uint64_t i = packs * N + thread; i < c.n; i += stride)
      chain_packs<T, Op, First, Last, 1, 1>(partial, input, to, also_to, channel.nranks, i, 0);
  }
  GAR_MEMBER bool reduce(uint64_t i) {
    const Range c = piece(range, i, args.chunk_count);
    if (first()) {
      if (!partials.open<false, true>()) return false;
      hop<true, false>(c);
      partials.close<false, true>();
    } else if (!last()) {
      if (!partials.open<true, true>()) return false;
      hop<false, false>(c);
      partials.close<true, true>();
    } else {
      if (!partials.open<true, false>() || !results.open<false, true>()) return false;
      hop<false, true>(c);
      partials.close<true, false>();
      results.close<false, true>();
    }
    return true;
  }
  // Rank p-1 made the result; rank p-2 is the last to get it.
  GAR_MEMBER bool pass_on(uint64_t i) {
    if (last()) return true;
    const Range c = piece(range, i, args.chunk_count);
    const bool sends = channel.rank + 2 != channel.nranks;
    if (!(sends ? results.open<true, true>() : results.open<true, false>())) return false;
    void* output = element<T>(args.output, c.lo);
    if (sends) {
      const Held<void*, 2> to{{output, results.send_slot()}};
      copy_to<T, 2>(channel.block, to, results.recv_slot(), c.n, false);
      results.close<true, true>();
    } else {
      copy<T>(channel.block, output, results.recv_slot(), c.n, args.streaming);
      results.close<true, false>();
    }
    return true;
  }
};

// NOTE chain lag. Each rank reduces chunk i, then passes on the result of chunk i - nranks: the result needs a whole
// turn of the ring, and waiting for it earlier would stall the partials. Rank p-1 stores result i once rank 0 has taken
// result i - nslots, which it does after reducing chunk i - nslots + nranks; the partials in flight between rank 0 and
// rank p-1 hold (p-1) nslots chunks, which is enough for nslots >= 2, so the cycle always has a free slot.
template <class T, class Op>
GAR_DEVICE bool ring_in_rank_order(const Block& block, const GarArgs& args) {
  Channel channel(block, args);
  if (!channel.begin()) return false;
  Chain<T, Op> chain(channel);
  const uint64_t rounds = chain.rounds(), lag = channel.nranks;
  for (uint64_t i = 0; i < rounds + lag; ++i) {
    if (i < rounds && !chain.reduce(i)) return false;
    if (i >= lag && !chain.pass_on(i - lag)) return false;
  }
  return channel.end(rounds);
}

}  // namespace gar
